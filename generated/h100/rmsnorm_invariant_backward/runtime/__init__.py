"""What is copied into every emitted package: no import from outside this folder but torch and
cuda-python, and nothing here touches CUDA before the first call. All of it is Python but native.cpp
and its headers, which are compiled on request and do nothing that Python does not do as well."""
