"""The hand-written cases of the zoo, a module for each kind of difficulty; ``benchmarks.zoo_hand`` joins them."""
