"""What makes Flower show samples and failures the way people ask for them."""
