"""Every class of wrong invocation, in every group: exit code 2, one line that says what to do, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from txl_lightning.cli import main

ROOT = Path(__file__).resolve().parent.parent

MISSPELT_KEYS = [
    ("fit model.n_layr=4", "model.n_layr=4: no such key; did you mean model.n_layer"),
    ("fit memory.mem_le=4", "memory.mem_le=4: no such key; did you mean memory.mem_len"),
    ("fit data.segmnt_len=4", "data.segmnt_len=4: no such key; did you mean data.segment_len"),
    ("fit optim.learning_rate=4", "optim.learning_rate=4: no such key; "),
    ("fit trainer.max_step=5", "trainer.max_step=5: no such key; did you mean trainer.max_steps"),
    ("fit strategy.timeout=5", "strategy.timeout=5: no such key; did you mean strategy.timeout_s"),
    ("fit logger.tensorbord=true", "logger.tensorbord=true: no such key; did you mean logger.tensorboard"),
    (
        "fit callbacks.text_samples.token=3",
        "callbacks.text_samples.token=3: no such key; did you mean callbacks.text_samples",
    ),
    (
        "fit callbacks.text_sample.tokens=3",
        "callbacks.text_sample.tokens=3: no such callback; did you mean text_samples?",
    ),
    ("fit eval.batchsize=3", "eval.batchsize=3: no such key; did you mean eval.batch_size?"),
    ("fit sede=3", "sede=3: no such key; did you mean seed?"),
    ("fit max_steps=3", "max_steps=3: no such key; did you mean trainer.max_steps?"),
    ("fit mem_len=3", "mem_len=3: txl fit has no such key, only txl analyze; did you mean memory.mem_len?"),
    ("fit trainr.max_steps=3", "trainr.max_steps=3: no such key; did you mean trainer.max_steps?"),
    ("fit memry=cache", "memry=cache: no such key; did you mean memory or "),
    ("fit xyzzy.plugh=3", "xyzzy.plugh=3: no such key; txl fit --help lists them"),
    ("fit model.n_layer.x=3", "model.n_layer.x=3: no such key; "),
    ("fit memory.parts.0=3", "memory.parts.0=3: no such key; "),
    ("fit model.=3", "model.=3: no such key; "),
    ("fit =3", "=3: no such key; "),
    ("generate ckpt=x temprature=3", "temprature=3: no such key; did you mean temperature?"),
    ("fit hydra.sweeper.max_batch=3", "hydra.sweeper.max_batch=3: "),
]

MISSPELT_OPTIONS = [
    ("fit experiment=defalt", "experiment=defalt: no such option; did you mean default?"),
    ("fit model=smal", "model=smal: no such option; did you mean small?"),
    ("fit memory=cahce", "memory=cahce: no such option; did you mean cache?"),
    ("fit memory.name=cahce", "memory=cahce: no such option; did you mean cache?"),
    ("fit memory=nowhere.module:Memory", "memory.name=nowhere.module:Memory: cannot be imported"),
    ("fit data=stdlb", "data=stdlb: no such option; did you mean stdlib?"),
    ("fit optim=sdg", "optim=sdg: no such option; did you mean sgd?"),
    ("fit trainer=defaut", "trainer=defaut: no such option; did you mean default?"),
    ("fit strategy=dpp", "strategy=dpp: no such option; did you mean ddp?"),
    ("fit logger=[csv,tensorbord]", "logger=[csv,tensorbord]: no such option; did you mean tensorboard?"),
    ("fit callbacks=text_sample", "callbacks=text_sample: no such option; did you mean text_samples?"),
    ("fit debug=fats", "debug=fats: no such option; did you mean fast?"),
    ("fit memory=", "memory=: no such option; choose one of associative, "),
    ("fit memory=null", "memory=null: no such option; "),
    ("fit memory=[none,cache]", "memory=[none,cache]: takes one option; for example memory=none"),
    ("fit trainer={max_steps: 5}", "trainer={max_steps: 5}: no such option; "),
    ("fit -m memory=none,cahce", "memory=cahce: no such option; did you mean cache?"),
    ("fit hydra/launcher=nowhere", "hydra/launcher=nowhere: "),
]

WRONG_TYPES = [
    ("fit model.n_layer=four", "model.n_layer=four: must be a whole number; choose a value >= 1: "),
    ("fit model.n_layer=4.5", "model.n_layer=4.5: must be a whole number; choose a value >= 1: "),
    ("fit model.pre_norm=3", "model.pre_norm=3: must be true or false; the default is false: "),
    ("fit model.pre_norm=maybe", "model.pre_norm=maybe: must be true or false; the default is false: "),
    ("fit model.tie_projs=[3]", "model.tie_projs=[3]: must be a list of true and false; the default is []: "),
    ("fit memory.mem_len=long", "memory.mem_len=long: must be a whole number; choose a value >= 0: tokens kept"),
    ("fit memory.mem_len=", "memory.mem_len=: must be a whole number; choose a value >= 0: tokens kept"),
    ("fit memory.layers=first", "memory.layers=first: must be all or a list of "),
    (
        "fit memory=compressive memory.mem_len=true",
        "memory.mem_len=true: must be a whole number; choose a value >= 1: ",
    ),
    ("fit memory=knn memory.offload=3", "memory.offload=3: no such choice; "),
    ("fit data.batch_size=[1]", "data.batch_size=[1]: must be a whole number; choose a value >= 1: "),
    ("fit optim.lr=fast", "optim.lr=fast: must be a number; choose a value > 0: peak learning rate"),
    ("fit optim.betas=0.9", "optim.betas=0.9: must be a list of 2 numbers; choose values >= 0 and <= 0.9999999: "),
    ("fit optim.betas=[a,b]", "optim.betas=[a,b]: must be a list of 2 numbers; choose values >= 0 and <= 0.9999999: "),
    ("fit trainer.devices=true", "trainer.devices=true: must be a whole number; choose a value >= 1: "),
    ("fit trainer.max_steps=many", "trainer.max_steps=many: must be a whole number; choose a value >= 1: optimizer "),
    ("fit trainer.max_steps={a: 1}", "trainer.max_steps={a: 1}: must be a whole number; "),
    ("fit trainer.max_steps=null", "trainer.max_steps=null: must be a whole number; "),
    ("fit trainer.val_check_interval=x", "trainer.val_check_interval=x: must be a number; choose a value > 0: "),
    ("fit trainer.stop_at_step=x", "trainer.stop_at_step=x: must be a whole number or null; choose a value >= 1: "),
    ("fit trainer.precision=[3]", "trainer.precision=[3]: must be text; choose one of auto, 32-true, "),
    ("fit strategy.timeout_s=1m", "strategy.timeout_s=1m: must be a whole number; choose a value >= 1: "),
    ("fit strategy.stage=x", "strategy.stage=x: must be a whole number or null; choose one of 0, 1, 2, 3, null: "),
    ("fit logger.csv=perhaps", "logger.csv=perhaps: must be true or false; the default is false: "),
    ("fit callbacks.text_samples.tokens=many", "callbacks.text_samples.tokens=many: must be a whole number; "),
    ("fit eval.segment_len=x", "eval.segment_len=x: must be a whole number or null; "),
    ("fit seed=x", "seed=x: must be a whole number; choose a value >= 0 and <= 4294967295: "),
    ("generate ckpt=CKPT prompt=a top_k=x", "top_k=x: must be a whole number; choose a value >= 0: "),
    ("eval ckpt=CKPT mem_lens=3", "mem_lens=3: must be a list of whole numbers; choose values >= 0: "),
    (
        "fit trainer.max_steps=${optim.nothing}",
        "trainer.max_steps=${optim.nothing}: Interpolation key 'optim.nothing' not found",
    ),
    ("fit trainer.max_steps=${optim.lr}", "trainer.max_steps=${optim.lr}: must be a whole number; "),
    ("fit trainer.max_steps=[1", "trainer.max_steps=[1: cannot be read: "),
    ("fit model='small", "model='small: cannot be read: "),
]

IDLE_KEYS = [
    ("fit trainer.max_skipped_steps=3", "trainer.max_skipped_steps=3: trainer.on_divergence=stop skips no step; "),
    (
        "fit model.max_distance=9",
        "model.max_distance=9: model.position=transformer_xl has no learned rows; leave it out",
    ),
    (
        "fit model.same_length_rule=mem_len+1",
        "model.same_length_rule=mem_len+1: model.same_length is false; leave it out",
    ),
    ("fit model.cluster_order=reversed", "model.cluster_order=reversed: model.cutoffs=[] makes no clusters; leave it"),
    (
        "fit model.cutoffs=[9] model.proj_same_dim=false",
        "model.proj_same_dim=false: model.div_val=1 makes all clusters equally wide; leave it out",
    ),
    ("fit optim=sgd optim.betas=[0.8,0.9]", "optim.betas=[0.8,0.9]: optim=sgd has none; leave it out"),
    ("fit optim=lion optim.eps=1e-6", "optim.eps=1e-6: optim=lion does not read it; leave it out"),
    ("fit optim.patience=2", "optim.patience=2: optim.schedule=cosine does not read it; leave it out"),
    ("fit optim.lr_factor=0.2", "optim.lr_factor=0.2: optim.schedule=cosine does not read it; leave it out"),
]

IMPOSSIBLE_VALUES = [
    ("fit model.n_layer=0", "model.n_layer=0: must be >= 1; choose a value >= 1: number of layers\n"),
    ("fit model.d_model=7", "model.d_model=7: must be even"),
    ("fit model.dropout=2", "model.dropout=2: must be <= 0.99; choose a value >= 0 and <= 0.99: dropout on embeddings"),
    ("fit optim.eps=0", "optim.eps=0: must be > 0; choose a value > 0: added to the denominator of the update; "),
    ("fit model.attention=quick", "model.attention=quick: no such choice; "),
    ("fit model.vocab_size=300", "model.vocab_size=300: the data has 257 symbols"),
    ("fit memory.mem_len=-1", "memory.mem_len=-1: must be >= 0; "),
    ("fit memory.layers=[9]", "memory.layers=[9]: the model has layers 0 to 3; "),
    (
        "fit memory=mix memory.parts=[{name: cache, reset: document}]",
        "memory.parts=[{name: cache, reset: document}]: memory starts anew in all parts at once",
    ),
    ("fit memory=cache memory.layers=[]", "memory.layers=[]: is empty, so no layer would have this memory; use "),
    ("fit memory=knn model.same_length=true", "model.same_length=true: limits distances, and what this memory finds"),
    (
        "fit memory=mix memory.parts=[{name: cahce}]",
        "memory.parts[0].name=cahce: no such memory; did you mean cache?",
    ),
    (
        "fit memory=mix memory.parts=[{name: cache, layers: [9]}]",
        "memory.parts[0].layers=[9]: the model has layers 0 to 3; leave the others out",
    ),
    (
        "fit memory=mix memory.parts=[{name: none}, {name: cache, layers: [1, 1]}]",
        "memory.parts[1].layers=[1,1]: names a layer twice; name each layer once",
    ),
    (
        "fit memory=mix memory.parts=[{name: cache, mem_len: -1}]",
        "memory.parts[0].mem_len=-1: must be >= 0; ",
    ),
    (
        "fit memory=mix memory.parts=[{name: cache, mem_len: true}]",
        "memory.parts[0].mem_len=true: must be a whole number; ",
    ),
    (
        "fit memory=mix memory.parts=[{name: cache, mem_le: 3}]",
        "memory.parts[0].mem_le=3: no such key; did you mean mem_len?",
    ),
    (
        "fit memory=mix memory.parts=[{mem_len: 3}]",
        "memory.parts[0].name=null: a memory needs a name; choose one of associative, ",
    ),
    (
        "fit memory=mix memory.parts=[{name: cache}, {name: cache, layers: [2]}]",
        "memory.parts=[{name: cache}, {name: cache, layers: [2]}]: layer 2 has two memories called cache; give them ",
    ),
    ("fit data.batch_size=0", "data.batch_size=0: must be >= 1; "),
    ("fit data=text data.path=missing.txt", "data.path=missing.txt: "),
    ("fit data.shuffle=words", "data.shuffle=words: no such choice; choose one of document, line, none"),
    ("fit data.segment_len_std=-1", "data.segment_len_std=-1: must be >= 0; "),
    ("fit data.tokenizer=missing.json", "data.tokenizer=missing.json: no such file; give bytes, bpe, "),
    ("fit data.tokenizer_size=300", "data.tokenizer_size=300: cannot go with data.tokenizer=bytes; leave it out"),
    ("fit optim.lr=0", "optim.lr=0: must be > 0; "),
    ("fit optim.lr=inf", "optim.lr=inf: must be a finite number; "),
    ("fit optim.name=sdg", "optim.name=sdg: no such choice; did you mean sgd?"),
    ("fit trainer.max_steps=-5", "trainer.max_steps=-5: must be >= 1; "),
    ("fit trainer.val_check_interval=1.5", "trainer.val_check_interval=1.5: a fraction of an epoch must be <= 1.0; "),
    ("fit trainer.precision=32", "trainer.precision=32: no such choice; "),
    ("fit trainer.precision=10e2", "trainer.precision=10e2: no such choice; "),
    ("fit strategy.timeout_s=0", "strategy.timeout_s=0: must be >= 1; "),
    ("fit callbacks.text_samples.tokens=0", "callbacks.text_samples.tokens=0: must be >= 1; "),
    ("fit eval.batch_size=0", "eval.batch_size=0: must be >= 1; "),
    ("fit seed=-1", "seed=-1: must be >= 0; "),
    ("fit -m seed=1,-1", "seed=-1: must be >= 0; "),
    ("fit run_dir=FILE", "run_dir=FILE: FILE is a file; name a folder"),
    ("fit run_dir=FILE/below", "run_dir=FILE/below: FILE is a file; name a folder"),
    ("fit run_dir=USED", "run_dir=USED: the folder holds a run already; "),
    ("data inspct", "action=inspct: no such choice; did you mean inspect?"),
    ("strategies out=nowhere/table.json", "out=nowhere/table.json: its folder does not exist; make the folder first"),
    ("strategies out=USED", "out=USED: is a folder; give a file in it"),
    ("eval ckpt=CKPT out=USED", "out=USED: is a folder; give a file in it"),
    (
        "eval ckpt=CKPT out=nowhere/score.json",
        "out=nowhere/score.json: its folder does not exist; make the folder first",
    ),
    ("data inspect out=FILE/facts.json", "out=FILE/facts.json: its folder does not exist; make the folder first"),
    ("generate ckpt=CKPT prompt_file=nowhere", "prompt_file=nowhere: no such file; give a text file"),
    ("generate ckpt=CKPT prompt_file=USED", "prompt_file=USED: no such file; give a text file"),
    ("generate ckpt=CKPT prompt=", "prompt=: is empty; give at least one character to continue"),
    ("eval ckpt=CKPT split=tset", "split=tset: no such choice; did you mean test"),
    ("generate ckpt=CKPT prompt=a temperature=-1", "temperature=-1: must be >= 0; "),
    ("eval ckpt=missing", "ckpt=missing: no such file or folder; "),
    ("eval ckpt=FILE", "ckpt=FILE: "),
    ("eval ckpt=USED", "ckpt=USED: the folder has no "),
    ("generate ckpt=missing prompt=a", "ckpt=missing: no such file or folder; "),
]

CONTRADICTIONS = [
    (
        "fit memory=none memory.mem_len=64",
        "memory.mem_len=64: memory=none has no such key; leave it out or choose memory=cache",
    ),
    ("fit memory.parts=[]", "memory.parts=[]: memory=cache has no such key; leave it out or choose memory=mix"),
    (
        "fit memory=mix memory.mem_len=256",
        "memory.mem_len=256: memory=mix has no such key; set it in the parts: "
        "'memory.parts=[{name: cache, layers: all, mem_len: 256}]'\n",
    ),
    (
        "fit memory=mix memory.parts=[{name: cache}] memory.mem_len=256",
        "memory.mem_len=256: memory=mix has no such key; set mem_len in memory.parts\n",
    ),
    ("fit -m memory=cache,none memory.mem_len=64", "memory.mem_len=64: memory=none has no such key; "),
    ("fit memory=none memory.name=cache", "memory.name=cache: contradicts memory=none; keep one of them"),
    ("fit data.path=x", "data.path=x: data=stdlib has no such key; leave it out or choose data=enwik8 or "),
    (
        "fit callbacks=none callbacks.text_samples.tokens=5",
        "callbacks.text_samples.tokens=5: the callback text_samples is off; ",
    ),
    ("fit trainer.devices=2", "strategy=auto: cannot run 2 ranks; set strategy=ddp or trainer.devices=1"),
    ("fit strategy=ddp trainer.devices=3", "data.batch_size=16: must divide into 3 ranks; set it to 15 or 18"),
    ("fit optim.lr=1e-4 optim.lr_min=1e-3", "optim.lr_min=1e-3: must be <= optim.lr=0.0001; "),
    (
        "fit strategy=ddp trainer.devices=2 eval.batch_size=7",
        "eval.batch_size=7: must divide into 2 ranks; set it to 6 or 8",
    ),
    ("demo memory=none", "memory=none: the demo compares with "),
    ("eval ckpt=CKPT experiment=default", "experiment=default: the checkpoint's own configuration is used; "),
    ("eval ckpt=CKPT memory=none memory.mem_len=64", "memory.mem_len=64: memory=none has no such key; "),
    ("generate ckpt=CKPT prompt=a prompt_file=FILE", "prompt_file=FILE: prompt is given as well; "),
    ("fit prompt=hello", "prompt=hello: txl fit has no such key, only txl generate; leave it out"),
    ("generate ckpt=x split=test", "split=test: txl generate has no such key, only txl eval and txl analyze; leave it"),
    ("fit memory=none,cache", "memory=none,cache: several values make a sweep, one job each; add -m"),
    (
        "fit optim.betas=0.9,0.95",
        "optim.betas=0.9,0.95: several values make a sweep, one job each; add -m, or write a list: ",
    ),
    ("fit -m hydra.sweep.dir=x", "hydra.sweep.dir=x: is set by txl; set run_dir=PATH"),
    ("fit -m seed=interval(1,2)", "seed=interval(1,2): Hydra's own sweeper takes no interval; "),
    ("fit -m hydra/sweeper=elsewhere seed=interval(1,2)", "hydra/sweeper=elsewhere: "),
    ("fit -m memory=glob(x*)", "memory=glob(x*): stands for no value at all; "),
    ("fit -m seed=range(3,3)", "seed=range(3,3): stands for no value at all; "),
]

UNREAD = [
    ("eval ckpt=x dry_run=true", "dry_run=true: txl eval does not read it; leave it out; txl fit reads it\n"),
    ("eval ckpt=x run_dir=y", "run_dir=y: txl eval does not read it; leave it out; txl fit and txl demo read it\n"),
    (
        "eval ckpt=x optim.lr=3",
        "optim.lr=3: txl eval does not read it; leave it out; txl fit, txl compare, txl bench and txl demo read it\n",
    ),
    ("eval ckpt=x optim=adam", "optim=adam: txl eval does not read it; "),
    ("eval ckpt=x optim.rate=3", "optim.rate=3: no such key; txl eval reads no key of optim\n"),
    ("eval ckpt=x trainer.max_steps=77", "trainer.max_steps=77: txl eval does not read it; "),
    ("eval ckpt=x trainer.max_step=77", "trainer.max_step=77: no such key; did you mean trainer.max_steps"),
    ("eval ckpt=x trainer=default", "trainer=default: txl eval does not read it; "),
    (
        "eval ckpt=x seed=3",
        "seed=3: txl eval does not read it; leave it out; txl fit, txl generate, txl analyze, txl compare, txl bench "
        "and txl demo read it\n",
    ),
    ("eval ckpt=x logger=csv", "logger=csv: txl eval does not read it; "),
    ("eval ckpt=x debug=fast", "debug=fast: txl eval does not read it; "),
    ("eval ckpt=x model.dropout=0.1", "model.dropout=0.1: txl eval does not read it; "),
    ("eval ckpt=x model.dropemb=0.1", "model.dropemb=0.1: txl eval does not read it; "),
    ("generate ckpt=x model.variational_dropout=true", "model.variational_dropout=true: txl generate does not read "),
    ("eval ckpt=x model.proj_init_std=0.1", "model.proj_init_std=0.1: txl eval does not read it; "),
    ("eval ckpt=x callbacks.text_samples.tokens=3", "callbacks.text_samples.tokens=3: txl eval does not read it; "),
    ("eval ckpt=x -m seed=1,2", "seed=1,2: txl eval does not read it; "),
    (
        "generate ckpt=x prompt=a trainer.precision=32-true",
        "trainer.precision=32-true: txl generate does not read it; ",
    ),
    ("generate ckpt=x prompt=a logger=csv", "logger=csv: txl generate does not read it; "),
    ("generate ckpt=x prompt=a eval.segment_len=5", "eval.segment_len=5: txl generate does not read it; "),
    ("generate ckpt=x prompt=a data=text", "data=text: txl generate does not read it; "),
    ("generate ckpt=x prompt=a experiment=default", "experiment=default: the checkpoint's own configuration is used; "),
    ("strategies optim.lr=3", "optim.lr=3: txl strategies does not read it; "),
    ("eval ckpt=x data.shuffle=line", "data.shuffle=line: txl eval does not read it; "),
    ("data inspect data.segment_len_std=3", "data.segment_len_std=3: txl data does not read it; "),
    ("strategies data.segment_len=3", "data.segment_len=3: txl strategies does not read it; "),
    ("data model.n_layer=2", "model.n_layer=2: txl data does not read it; "),
    ("data prepare memory.mem_len=2", "memory.mem_len=2: txl data does not read it; "),
    ("data inspect data.batch_size=2", "data.batch_size=2: txl data does not read it; "),
    ("reproduce wt103_bse", "name=wt103_bse: nothing was published under this name; did you mean wt103_base"),
    ("reproduce speed=0", "speed=0: must be > 0; "),
    ("reproduce wt103_base memory=none", "memory=none: txl reproduce does not read it; leave it out; "),
    ("demo dry_run=true", "dry_run=true: txl demo does not read it; leave it out; txl fit reads it\n"),
]

FORMS = [
    ("-m", "command=: is missing; choose one of fit, "),
    ("memory=none", "command=: is missing; write txl fit memory=none"),
    ("fti", "command=fti: no such command; did you mean fit?"),
    ("compress", "command=compress: no such command; "),
    ("fit seed", "seed=: needs a value; write seed=VALUE"),
    ("fit prepare", "prepare=: no such key; "),
    ("fit trainer.max_steps=", "trainer.max_steps=: has no value and must be a whole number; "),
    ("fit eval=3", "eval=3: is a group of keys, not one; set eval.batch_size, eval.segment_len"),
    ("fit callbacks.text_samples=3", "callbacks.text_samples=3: is a group of keys, not one; set callbacks.NAME.KEY"),
    ("fit ~callbacks", "~callbacks=: keys are neither added nor deleted, they only get values; write callbacks=none"),
    ("fit ~trainer.max_steps", "~trainer.max_steps=: keys are neither added nor deleted"),
    (
        "fit +trainer.max_steps=3",
        "+trainer.max_steps=3: keys are neither added nor deleted, they only get values; write trainer.max_steps=3",
    ),
    ("fit ++trainer.max_step=3", "trainer.max_step=3: no such key; did you mean trainer.max_steps"),
    ("fit model@net=small", "model@net=small: groups stay where they are; write model=small"),
    ("fit hydra.run.dir=x", "hydra.run.dir=x: is set by txl; set run_dir=PATH"),
    ("fit --multrun seed=1,2", "flag=--multrun: no such flag; did you mean --multirun?"),
    ("fit --max_steps 5", "flag=--max_steps: no such flag; "),
    ("fit -x", "flag=-x: no such flag; "),
    ("fit --cfg", "--cfg=: needs a value; for example --cfg job"),
    ("fit --cfg jbo", "--cfg=jbo: no such value; it takes job, hydra, all"),
    ("fit --cfg job --package optm", "--package=optm: no such part of the configuration; did you mean optim?"),
    ("fit --cfg hydra --package hydra.nothing", "--package=hydra.nothing: "),
    ("fit --package optim", "flag=--package: only says how --cfg prints; "),
    ("fit -m --cfg job", "flag=--cfg: cannot go with --multirun; "),
    ("fit --multirun=yes", "--multirun=yes: no such value; it takes none"),
    ("fit --config-dir nowhere", "--config-dir=nowhere: no such folder; "),
    ("fit --config-dir", "--config-dir=: needs a value; "),
    ("--shell-completion install=csh", "--shell-completion=: No completion plugin for 'csh' found"),
    ("eval", "ckpt=: is missing; give ckpt=PATH"),
    ("generate prompt=a", "ckpt=: is missing; give ckpt=PATH"),
    ("generate ckpt=CKPT", "prompt=: is missing; give prompt=TEXT, prompt=- for standard input, prompt_file"),
]

CASES = MISSPELT_KEYS + MISSPELT_OPTIONS + WRONG_TYPES + IDLE_KEYS + IMPOSSIBLE_VALUES + CONTRADICTIONS + UNREAD + FORMS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a checkpoint of the default model, untrained."""
    import torch

    from txl_lightning.config import load
    from txl_lightning.model.transformer import TransformerXL

    config = load()
    folder = tmp_path_factory.mktemp("run")
    (folder / "checkpoints").mkdir()
    weights = {f"model.{name}": tensor for name, tensor in TransformerXL(config).state_dict().items()}
    saved = {"txl_lightning": {"config": config.to_dict(), "data_fingerprint": None}, "state_dict": weights}
    torch.save(saved, folder / "checkpoints" / "last.ckpt")
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a file and a used run folder, which must look the same afterwards."""
    (tmp_path / "FILE").write_text("not a checkpoint")
    (tmp_path / "USED").mkdir()
    (tmp_path / "USED" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    before = listing(tmp_path)
    yield tmp_path
    assert listing(tmp_path) == before


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def arguments(line: str, checkpoint: Path) -> list[str]:
    """Words of a line; a list or group in brackets is one word."""
    words: list[str] = []
    for word in line.replace("CKPT", str(checkpoint)).split():
        if words and any(words[-1].count(left) > words[-1].count(right) for left, right in ("{}", "[]")):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


@pytest.mark.parametrize(("line", "said"), CASES, ids=[line or "nothing" for line, _ in CASES])
def test_refused_in_one_line(
    line: str, said: str, place: Path, checkpoint: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(arguments(line, checkpoint))
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {said}")
    assert (code, err.count("\n"), err[-1]) == (2, 1, "\n")
    assert out == ""
    assert not own_cache.exists()


def test_every_message_names_rule_and_cure(place: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("fit model.n_layr=4", "fit memory=cahce", "fit seed=x", "eval ckpt=FILE", "fit --nope", "fti"):
        assert main(arguments(line, checkpoint)) == 2
        key, _, rest = capsys.readouterr().err.removeprefix("error: ").partition("=")
        value_and_rule, _, cure = rest.partition("; ")
        assert key and ": " in value_and_rule and cure.strip()


@pytest.mark.parametrize(
    "program", [["-m", "txl_lightning"], ["-c", "import sys; from txl_lightning.cli import main; sys.exit(main())"]]
)
@pytest.mark.parametrize(
    "line", ["fit memory=none memory.mem_len=64", "fit data=text data.path=missing.txt", "nothing"]
)
def test_a_process_ends_with_2(program: list[str], line: str, place: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *program, *line.split()], cwd=place, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
