"""What the compiler tells us of a step, and the rates of the chips that it is for."""
PEAK_FLOPS = {  # bfloat16 matmul FLOP/s of a device, by its `device_kind`, from the vendors' data sheets
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12, "TPU7x": 1153e12,
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA B200": 2250e12,
}


def report(compiled):
    """Bytes on each device of a compiled step: its arguments, outputs (not the donated ones), temporaries, code."""
    m = compiled.memory_analysis()
    return {"arguments": m.argument_size_in_bytes, "outputs": m.output_size_in_bytes - m.alias_size_in_bytes,
            "temporaries": m.temp_size_in_bytes, "code": m.generated_code_size_in_bytes}
