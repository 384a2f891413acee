"""The models that benchmarks and tests share.

- ``families``: what the others are made of: ResNet, and BERT, GPT-2, Llama, T5 and ViT of any size.
- ``full``: of the usual sizes, on the meta device; ``gpu``: for a GPU to train; ``small``: for a CPU to train.
- ``tasks``, ``followed``, ``tuned``: small ones with real data, which are trained, followed step by step, and tuned.
- ``zoo``: tiny ones of many architectures, written by hand; ``architectures``: of all that one rule makes.
- ``decoders``: one layer of each family of decoders; ``tiny``: modules of a few layers.
- ``hand``: hand-written modules, each with one difficulty.
"""
