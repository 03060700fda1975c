"""Train models that do not fit the device: streamed layers, lazy updates, transfers, low precision, chunked loss."""
