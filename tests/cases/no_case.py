"""A script that offers nothing to verify."""
