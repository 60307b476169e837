"""Fine-tuning for the way a model is decoded: masks, positions and targets come from the decoding
methods.
"""
