"""The parts of ``tools/train_tiny.py``: corpus, network, training, baselines and the model card."""
