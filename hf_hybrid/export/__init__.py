"""Export of a finished run, merged or in few bits, with its cost measured: see `exporter.py`."""
