"""Hybrid trainers for other libraries; a module needs its library and is imported when a name of it is asked for."""
