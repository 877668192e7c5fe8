"""Programs that use earmill as anybody else would."""
