"""What training minimizes: so far the cross-entropy of target tokens."""
