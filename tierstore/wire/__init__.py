"""The protocol between a service and its workers: messages, and their framing in a stream."""
