"""Read by JupyterLab when scripts/lab.sh starts it: controls (sliders, buttons) are not written into a notebook's file.

A control works only with the kernel that made it; in a notebook that is opened again it would be a line "model not
found". Without it, what stands beside each control is left: the picture or the question, and how to wake the controls.
"""

WIDGET = "application/vnd.jupyter.widget-view+json"


def leave_out_controls(model, **_):
    """Takes the controls out of what is about to be saved; the page in the browser keeps them."""
    if model["type"] != "notebook":
        return
    for cell in (model.get("content") or {}).get("cells", []):
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if WIDGET not in output.get("data", {})]


c = get_config()  # noqa: F821 (given by Jupyter)
c.ContentsManager.pre_save_hook = leave_out_controls
