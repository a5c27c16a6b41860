"""Let nnU-Net plan, train and predict over a tiny dataset; run by the Python that it is installed for.

    python nnunet_peer.py FOLDER CONFIGURATION

It leaves image.npy, classes.npy and the results folder res/ in FOLDER; and of a volume of other voxels, coarse.npy,
what it becomes on the grid of the training, and the probabilities of classes there.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

FEATURES = [8, 16, 24]
SIZE = {"spacing": [8.0, 8.0, 8.0]}
OTHER = [8.0, 11.0, 6.5]


def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return an image and labels 0, 1, 2 of it, uint8."""
    from scipy.ndimage import gaussian_filter

    field = gaussian_filter(rng.normal(size=shape), 3)
    field /= field.std()
    labels = (field > 0.5).astype(np.uint8) + (field > 1.2)
    return np.clip(100 + 50 * field + rng.normal(0, 10, shape), 1, 255).astype(np.uint8), labels.astype(np.uint8)


def main(folder: Path, configuration: str) -> None:
    for name in ("raw", "pre", "res"):
        (folder / name).mkdir()
    os.environ |= {
        "nnUNet_raw": str(folder / "raw"), "nnUNet_preprocessed": str(folder / "pre"),
        "nnUNet_results": str(folder / "res"), "nnUNet_n_proc_DA": "1", "nnUNet_def_n_proc": "1", "nnUNet_compile": "f",
    }  # fmt: skip
    import tifffile
    import torch
    from nnunetv2.experiment_planning.plan_and_preprocess_api import extract_fingerprints, plan_experiments, preprocess

    rng, dataset = np.random.default_rng(0), folder / "raw" / "Dataset001_Tiny"
    for part in ("imagesTr", "labelsTr", "imagesTs"):
        (dataset / part).mkdir(parents=True)
    for i in range(5):
        image, labels = make(rng, (40, 48, 56))
        tifffile.imwrite(dataset / "imagesTr" / f"c{i}_0000.tif", image)
        tifffile.imwrite(dataset / "labelsTr" / f"c{i}.tif", labels)
        for part in ("imagesTr", "labelsTr"):
            (dataset / part / f"c{i}.json").write_text(json.dumps(SIZE))
    image, _ = make(rng, (45, 70, 83))
    np.save(folder / "image.npy", image)
    tifffile.imwrite(dataset / "imagesTs" / "t_0000.tif", image)
    (dataset / "imagesTs" / "t.json").write_text(json.dumps(SIZE))
    described = {"channel_names": {"0": "zscore"}, "labels": {"background": 0, "a": 1, "b": 2}}
    (dataset / "dataset.json").write_text(json.dumps(described | {"numTraining": 5, "file_ending": ".tif"}))
    extract_fingerprints([1], num_processes=1)
    plan_experiments([1])
    shrink(folder / "pre" / dataset.name / "nnUNetPlans.json", configuration)
    preprocess([1], configurations=(configuration,), num_processes=(1,))
    os.environ |= {"nnUNet_n_proc_DA": "0"}
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    from nnunetv2.run.run_training import get_trainer_from_args

    device = torch.device("cpu")
    for fold in (0, 1):
        trainer = get_trainer_from_args("1", configuration, fold, "nnUNetTrainer", "nnUNetPlans", device=device)
        trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 1, 15, 1
        trainer.run_training()
    predictor = nnUNetPredictor(device=device, allow_tqdm=False)
    name = f"nnUNetTrainer__nnUNetPlans__{configuration}"
    predictor.initialize_from_trained_model_folder(str(folder / "res" / dataset.name / name), (0, 1))
    predictor.predict_from_files_sequential([[str(dataset / "imagesTs" / "t_0000.tif")]], [str(folder / "predicted")])
    np.save(folder / "classes.npy", tifffile.imread(folder / "predicted.tif"))
    coarse, _ = make(rng, (41, 60, 75))
    np.save(folder / "coarse.npy", coarse)
    resample(folder, predictor, coarse)


def resample(folder: Path, predictor: Any, image: np.ndarray) -> None:
    """Write what `image`, of voxels of OTHER nm, is on the grid of the training, and the probabilities of classes."""
    from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor

    plans, configuration = predictor.plans_manager, predictor.configuration_manager
    data, _, _ = DefaultPreprocessor(verbose=False).run_case_npy(
        image[None], None, {"spacing": OTHER}, plans, configuration, predictor.dataset_json
    )
    import torch

    logits = predictor.predict_logits_from_preprocessed_data(torch.from_numpy(data)).float()
    np.savez(folder / "resampled.npz", data=data[0], probabilities=torch.softmax(logits, 0).numpy())


def shrink(file: Path, configuration: str) -> None:
    """Make the planned net small enough for a CPU."""
    plans = json.loads(file.read_text())
    own = plans["configurations"][configuration]
    own["patch_size"] = [32, 32, 32] if configuration == "3d_fullres" else [32, 40]
    dims, stages = len(own["patch_size"]), len(FEATURES)
    own["architecture"]["arch_kwargs"] |= {
        "n_stages": stages, "features_per_stage": FEATURES, "kernel_sizes": [[3] * dims] * stages,
        "strides": [[1] * dims] + [[2] * dims] * (stages - 1), "n_conv_per_stage": [2] * stages,
        "n_conv_per_stage_decoder": [2] * (stages - 1),
    }  # fmt: skip
    file.write_text(json.dumps(plans))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
