"""Command line of moelora."""
