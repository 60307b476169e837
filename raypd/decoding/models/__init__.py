"""The families of models that the engine computes, mostly one file each; `registry` lists them."""
