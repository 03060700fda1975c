"""Where the bytes are: streaming, lazy updates, precision, placement and plans."""
