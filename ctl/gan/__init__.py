"""What GANs share: the losses on logits, the two objectives, the noise, the distances between real and made images."""
