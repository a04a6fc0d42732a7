"""What the server tells people about itself: a page at / and the JSON behind it."""
