"""What `txl bench` measures: speed and memory of training, evaluation, decoding, attention, reading and the trainer."""
