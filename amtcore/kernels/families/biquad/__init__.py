"""Real first- and second-order sections: hair-cell low-passes and slow modulation filters."""
