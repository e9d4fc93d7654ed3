"""What a service and its workers say to each other: messages, and how they lie in a stream."""
