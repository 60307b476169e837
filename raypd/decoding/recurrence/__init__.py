"""Recurrent and convolution layers: their states, the chains of segments, and what they compute."""
