"""The command line: `hf-hybrid`."""
