"""What tests of several folders share, and that is about no part of the package in particular."""
