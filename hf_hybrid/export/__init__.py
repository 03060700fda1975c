"""Low-bit export of a finished run, with its cost measured: see `exporter.py`."""
