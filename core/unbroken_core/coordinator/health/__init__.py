"""What becomes of findings of the pods' watches: noting them, and blaming pods for them."""
