"""What tests of decode share with others."""

LENGTHS = [[0, 1, 40], [31, 32, 33], [0, 0, 0]]


LAYOUTS = {
    "equal": {"ranks": [(64, 64)] * 3},
    "ragged": {"ranks": [(48, 16), (0, 96), (16, 0)]},
    "odd": {"ranks": [(7, 13), (1, 0), (0, 5)], "page": 1},
    "zeros": {"ranks": [(48, 16), (0, 96), (16, 0)], "bits": 8, "zeros": True},
    "four bits": {"ranks": [(64, 64), (32, 48), (0, 16)], "bits": 4, "tracked": True},
    "sub-groups": {"ranks": [(24, 20), (0, 16), (8, 0)], "bits": 4, "sub_group": 8, "zeros": True},
    "planes": {"ranks": [(24, 20), (9, 16), (8, 0)], "bits": 3},
    "no keys": {"ranks": [(0, 8), (0, 16), (0, 3)]},
    "no values": {"ranks": [(8, 0), (16, 0), (3, 0)]},
}
