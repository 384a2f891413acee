"""What a converted model runs with: its variants, their working copies, and the module that holds them."""
