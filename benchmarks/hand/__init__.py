"""The hand-written cases of the zoo, by what makes them hard; ``benchmarks.zoo_hand`` joins them."""
