"""Measures of a trained model: metrics, rankings of a catalogue, baselines."""
