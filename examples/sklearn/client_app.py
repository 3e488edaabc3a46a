"""A linear classifier of scikit-learn on the measurements of tumours that scikit-learn ships."""

from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

from fedsync.client import SiloApp
from fedsync.client.sklearn import SklearnModel

app = SiloApp()


def make_model():
    return SklearnModel(SGDClassifier(loss="log_loss", alpha=0.01), features=30, classes=[0, 1])


@app.setup()
def setup(silo):
    x, y = load_breast_cancer(return_X_y=True)
    share = slice(silo.index, None, silo.options["silos"])
    x, y = x[share], y[share]
    cut = len(y) * 4 // 5
    x = (x - x[:cut].mean(axis=0)) / x[:cut].std(axis=0)  # each site by its own figures
    return silo.use(make_model, (x[:cut], y[:cut]), (x[cut:], y[cut:]), examples=cut)


@app.train(opaque=True)
def fit(work, model, train):
    x, y = train
    with model.estimator() as estimator:
        estimator.partial_fit(x[work.rows], y[work.rows])


@app.evaluate()
def test(model, val):
    x, y = val
    with model.estimator() as estimator:
        loss = log_loss(y, estimator.predict_proba(x))
        return {"loss": (loss, len(y)), "accuracy": (estimator.score(x, y), len(y))}
