"""From bytes to samples at a model's rate: containers, decoders, channels, resampling."""
