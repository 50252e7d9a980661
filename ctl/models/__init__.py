"""Keras models that more than one experiment needs."""
