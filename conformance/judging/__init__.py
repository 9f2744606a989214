"""One array against one bound, one decision against its margin, and the outcome that follows."""
