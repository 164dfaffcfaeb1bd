"""GGML's numbers of the types that samples and llama-quantize's rules use (ggml.h, ggml_type)."""

F32, F16, BF16 = 0, 1, 30
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 2, 3, 6, 7, 8
Q2_K, Q4_K, Q5_K, Q6_K = 10, 12, 13, 14
IQ4_NL, IQ4_XS = 20, 23
