"""A trained model behind the interface of lm_eval, the language model evaluation harness (`pip install -e '.[eval]'`).

from lm_eval import simple_evaluate
from nas.inference.harness import new_harness

print(simple_evaluate(model=new_harness("runs/mine/found"), tasks=["wikitext"])["results"])
"""

from pathlib import Path

import numpy as np
import torch

from nas.core.errors import InputError
from nas.data.vocabulary import VOCABULARY, Vocabulary
from nas.inference.generation import Sampling, TextWriter
from nas.inference.language_model import load_model
from nas.inference.onnx_graph import StreamReader, graph_reader, model_reader, stream_model
from nas.mixture.mixture import load_mixture
from nas.retraining.weights import GRAPH

TOKENS = 256  # of generated text, if a task gives no number


class Harness:
    """The three requests of lm_eval. Each has `args`, as lm_eval.api.model.LM describes them.

    folder: of a training or an export, also of an ONNX graph. Raises InputError as load_model() and stream_model().
    """

    def __init__(self, folder: Path):
        if (folder / GRAPH).exists():
            self.reader = graph_reader(folder, load_mixture(folder))
        else:
            model = load_model(folder, "cpu")
            alone = StreamReader(None, {}, model.config.train.segment, model.mixture)
            self.reader = model_reader(*stream_model(model), model.mixture) if model.module else alone
        self.vocabulary = Vocabulary.load(folder / VOCABULARY)

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text that begins with a line end, or to which one is added."""
        if self.vocabulary.line_end is None:
            raise InputError("the vocabulary has no line end, which begins each text; train with data.newline=keep")
        ids = self.vocabulary.encode(text)
        begun = len(ids) and ids[0] == self.vocabulary.line_end
        return ids if begun else np.append(self.vocabulary.line_end, ids)

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        results = []
        for context, continuation in (request.args for request in requests):
            ids = self.encode(context + continuation)
            # A token that has letters of both counts. White space between them belongs to the continuation.
            before = self.encode(context.rstrip())[: len(ids)]
            same = int((before == ids[: len(before)]).cumprod().sum())
            log_p, greedy = self.reader.score(ids)
            results.append((float(log_p[same - 1 :].sum(dtype=np.float64)), bool(greedy[same - 1 :].all())))
        return results

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        """As nas.score of texts that begin with a line end."""
        encode = self.vocabulary.encode if self.vocabulary.line_end is None else self.encode
        texts = (request.args[0] for request in requests)
        return [float(self.reader.score(encode(text))[0].sum(dtype=np.float64)) for text in texts]

    def generate_until(self, requests: list) -> list[str]:
        results, generator = [], torch.Generator().manual_seed(0)
        for context, options in (request.args for request in requests):
            sampling, stops, count = generation_options(options)
            ids = self.encode(context).astype(np.int64)
            writer, written = TextWriter(self.vocabulary, ids, stops), b""
            self.reader.restart()
            for start in range(0, len(ids), self.reader.segment):
                log_p = self.reader.read(ids[None, start : start + self.reader.segment])
            for _ in range(count):
                (token,) = sampling.draw(torch.from_numpy(log_p[:, -1]), generator).tolist()
                written += writer.write(token)
                if writer.is_done:
                    break
                log_p = self.reader.read(np.array([[token]]))
            results.append((written + writer.rest()).decode(errors="replace"))
        return results


def generation_options(options: dict) -> tuple[Sampling, list[str], int]:
    """How tokens are drawn, the texts at which generation stops, and the most tokens.

    options: `do_sample`, `temperature`, `top_k`, `top_p`, `until` and `max_gen_toks` or `max_new_tokens`, as tasks of
    lm_eval give them. Without temperature and do_sample, the most probable token is drawn.
    """
    given = {key: value for key, value in options.items() if value is not None}
    temperature, until = given.get("temperature", 1.0), given.get("until", [])
    drawn = given.get("do_sample", "temperature" in given)
    sampling = Sampling(temperature, given.get("top_k"), given.get("top_p")) if drawn else Sampling(0)
    stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    return sampling, stops, given.get("max_gen_toks", given.get("max_new_tokens", TOKENS))


def new_harness(folder: str | Path):
    """An lm_eval.api.model.LM of a trained model. Raises InputError if lm_eval is not installed, and as Harness."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise InputError("this needs the package lm_eval, which is not installed: pip install -e '.[eval]'") from None

    class Model(Harness, LM):
        def __init__(self):
            LM.__init__(self)
            Harness.__init__(self, Path(folder))

    return Model()
