"""What a GPU could make of a converted model, by its sizes and the GPU's peak rates alone. Nothing is run."""
