"""Models of Hugging Face: their config.json, the names of their tensors, their files.

config     `read_config`: the `ModelSpec` in a config.json. `families`, `parts`, `usual` and
           `fields` say what each architecture writes there, and what its code does unsaid
names      the names and layouts of the tensors in transformers, and of the same ones in `GPT`
writing    `config_of`: the config.json of a spec
loading    reads a model's files into a `GPT` or a checkpoint of the course
convert    writes a checkpoint of the course as a model of transformers, one file, or PyTorch's

It imports nothing: `course_lib.core` reads specs with the first ones.
"""
