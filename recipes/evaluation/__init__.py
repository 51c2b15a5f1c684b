"""What a trained model is measured by: metrics, rankings of a catalogue, baselines."""
