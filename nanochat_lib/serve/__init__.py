"""Talking to a trained model: in the terminal."""
