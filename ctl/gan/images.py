"""The images that `gan_images` has networks for. Without TensorFlow, so that a tool that makes them can ask at once."""

BASE = 4  # height and width that the generator begins with, pixels; every block doubles them
SIZES = (8, 16, 32, 64, 128)  # height and width of an image, pixels
CHANNELS = (1, 3)  # grey, or colour
