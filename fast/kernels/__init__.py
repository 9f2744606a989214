"""The stages' inner loops: C++ for the CPU, built where a compiler is found, and Triton for CUDA."""
