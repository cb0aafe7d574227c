"""The data of kvtop: frozen, with units in the names, the same live and replayed."""
