// The browser's side of vp.explore: planes that share one place and one zoom, and ask Python for what is in sight.
// Not here: voxels, greys and colours, which come as PNGs with their edges in nm (explore.py).

const PLANES = { xy: [1, 2], xz: [0, 2], yz: [1, 0] }; // down, across; of z, y, x
const CUT = { xy: 0, xz: 1, yz: 2 };
const HEIGHT = 300;

function element(kind, parent, attributes = {}, text = "") {
  const made = document.createElement(kind);
  Object.assign(made, attributes);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

function labelled(parent, text, attributes) {
  const label = element("label", parent, {}, text + " ");
  label.style.cssText = "display:inline-flex;align-items:center;gap:4px;margin-right:12px;font:12px sans-serif";
  return element("input", label, attributes);
}

class Planes {
  constructor(model, root) {
    this.model = model;
    this.root = element("div", root, { className: "volpipe-explore" });
    this.root.style.cssText = "width:100%";
    this.still = element("img", this.root, { src: model.get("still"), alt: "three planes of each volume" });
    this.still.style.maxWidth = "100%"; // it goes when Python answers, which in an exported page it does not
    this.number = 0;
    this.waiting = false; // for pictures
    this.again = false; // something moved meanwhile
    this.pictures = new Map(); // by row, plane and what
    this.hears = (message, buffers) => this.receive(message, buffers);
    model.on("msg:custom", this.hears);
    this.resized = new ResizeObserver(() => this.scene && this.ask());
    model.send({ kind: "open" });
  }

  close() {
    this.model.off("msg:custom", this.hears);
    this.resized.disconnect();
  }

  async receive(message, buffers) {
    if (message.kind === "scene" && !this.scene) this.build(message);
    if (message.kind === "refusal") this.refuse(message);
    if (message.kind !== "pictures") return;
    try {
      await this.take(message, buffers);
    } catch (error) {
      this.refuse({ text: String(error) });
    }
  }

  build(scene) {
    this.still.remove();
    this.scene = scene;
    this.at = [...scene.at];
    this.level = null;
    this.opacity = scene.opacity;
    this.shades = scene.shades.map((range) => [...range]);
    this.controls();
    this.panels = [];
    this.grid = element("div", this.root);
    scene.names.forEach((name, row) => {
      element("div", this.grid, { title: name }, name).style.cssText =
        "font:12px sans-serif;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;margin-top:4px";
      const line = element("div", this.grid);
      line.style.cssText = "display:flex;gap:4px";
      for (const plane of Object.keys(PLANES)) this.panels.push(this.panel(line, row, plane));
    });
    this.status = element("div", this.root, { className: "volpipe-status" });
    this.status.style.cssText = "font:12px sans-serif;min-height:16px;white-space:pre-wrap";
    this.fit();
    this.resized.observe(this.root);
    this.ask();
  }

  controls() {
    const { scene } = this;
    const bar = element("div", this.root);
    bar.style.cssText = "display:flex;flex-wrap:wrap;align-items:center";
    const shown = element("select", bar, { title: "planes" });
    for (const name of ["all", ...Object.keys(PLANES)]) element("option", shown, { value: name }, name);
    shown.style.marginRight = "12px";
    shown.onchange = () => this.choose(shown.value);
    this.sliders = ["z", "y", "x"].map((axis, i) => {
      const slider = labelled(bar, axis, { type: "range", min: 0, max: scene.shape[i] - 1, step: 1, name: axis });
      const text = element("span", slider.parentElement);
      slider.oninput = () => this.move(i, scene.origin[i] + Number(slider.value) * scene.voxel[i]);
      return { slider, text };
    });
    const level = labelled(bar, "level", { type: "range", min: -1, max: scene.levels - 1, step: 1, value: -1, name: "level" });
    const levelText = element("span", level.parentElement, {}, "auto");
    level.oninput = () => {
      this.level = Number(level.value) < 0 ? null : Number(level.value);
      levelText.textContent = this.level === null ? "auto" : String(this.level);
      this.ask();
    };
    if (scene.labels !== null) {
      const opacity = labelled(bar, "labels", { type: "range", min: 0, max: 1, step: 0.05, name: "opacity" });
      opacity.value = this.opacity;
      opacity.oninput = () => {
        this.opacity = Number(opacity.value);
        this.draw();
      };
    }
    ["black", "white"].forEach((name, i) => {
      const input = labelled(bar, name, { type: "number", step: "any", name, value: this.shades[0][i] });
      input.style.width = "70px";
      input.onchange = () => {
        const value = Number(input.value);
        this.shades.forEach((range, row) => {
          if (String(scene.shades[row]) === String(scene.shades[0])) range[i] = value;
        });
        this.ask();
      };
    });
    const fit = element("button", bar, {}, "fit");
    fit.onclick = () => {
      this.at = [...scene.at];
      this.fit();
      this.ask();
    };
  }

  panel(line, row, plane) {
    const canvas = element("canvas", line);
    canvas.dataset.row = row;
    canvas.dataset.plane = plane;
    canvas.style.cssText = `flex:1 1 0;min-width:0;height:${HEIGHT}px;background:#222;cursor:grab;touch-action:none`;
    const panel = { canvas, row, plane };
    canvas.addEventListener("wheel", (event) => this.wheel(event, panel), { passive: false });
    canvas.onpointerdown = (event) => {
      canvas.setPointerCapture(event.pointerId);
      panel.from = [event.offsetY, event.offsetX];
    };
    canvas.onpointermove = (event) => panel.from && this.drag(event, panel);
    canvas.onpointerup = canvas.onpointercancel = () => (panel.from = null);
    return panel;
  }

  visible() {
    return this.panels.filter((panel) => panel.canvas.clientWidth > 0);
  }

  choose(name) {
    for (const { canvas, plane } of this.panels) canvas.style.display = name === "all" || name === plane ? "" : "none";
    this.fit();
    this.ask();
  }

  // Choose the zoom at which all of the volumes is seen in every panel.
  fit() {
    const { low, high } = this.scene;
    const reach = this.at.map((place, axis) => 2 * Math.max(high[axis] - place, place - low[axis]));
    const needs = this.visible().flatMap(({ canvas, plane }) => {
      const [down, across] = PLANES[plane];
      return [reach[down] / canvas.clientHeight, reach[across] / canvas.clientWidth];
    });
    this.fitted = needs.length > 0;
    this.pixel = Math.max(1e-9, ...needs);
  }

  move(axis, place) {
    this.at[axis] = Math.min(this.scene.high[axis], Math.max(this.scene.low[axis], place));
    this.draw();
    this.ask();
  }

  drag(event, panel) {
    const here = [event.offsetY, event.offsetX];
    PLANES[panel.plane].forEach((axis, i) => this.move(axis, this.at[axis] - (here[i] - panel.from[i]) * this.pixel));
    panel.from = here;
  }

  wheel(event, panel) {
    event.preventDefault();
    const cut = CUT[panel.plane];
    if (event.shiftKey || event.ctrlKey) {
      this.move(cut, this.at[cut] + Math.sign(event.deltaY || event.deltaX) * this.scene.voxel[cut]);
      return;
    }
    const pixel = this.pixel * Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300)));
    const from = [event.offsetY - panel.canvas.clientHeight / 2, event.offsetX - panel.canvas.clientWidth / 2];
    PLANES[panel.plane].forEach((axis, i) => (this.at[axis] += from[i] * (this.pixel - pixel)));
    this.pixel = pixel;
    this.draw();
    this.ask();
  }

  // One question at a time: what moved meanwhile is asked when the answer is here.
  ask() {
    const panels = this.visible();
    if (!panels.length) return;
    if (!this.fitted) this.fit();
    if (this.waiting) {
      this.again = true;
      return;
    }
    this.waiting = true;
    this.number += 1;
    this.root.dataset.state = "waiting";
    const ratio = window.devicePixelRatio || 1;
    this.model.send({
      kind: "view", number: this.number, at: this.at, pixel: this.pixel / ratio, level: this.level, shades: this.shades,
      panels: panels.map(({ canvas, row, plane }) => ({
        row, plane, size: [canvas.clientHeight * ratio, canvas.clientWidth * ratio],
      })),
    });
  }

  async take(message, buffers) {
    const drawings = await Promise.all(
      message.pictures.map((picture, i) => createImageBitmap(new Blob([buffers[i]], { type: "image/png" })))
    );
    this.pictures = new Map(
      message.pictures.map((picture, i) => [`${picture.row} ${picture.plane} ${picture.what}`, { ...picture, bitmap: drawings[i] }])
    );
    this.notes = message.notes;
    this.answered();
    this.tell();
    this.draw();
  }

  refuse(message) {
    if (!this.status) this.status = element("div", this.root, { className: "volpipe-status" });
    this.status.textContent = message.text;
    if (this.scene) this.answered();
  }

  answered() {
    this.waiting = false;
    if (this.again) {
      this.again = false;
      this.ask();
    } else this.root.dataset.state = "ready";
  }

  tell() {
    const lines = [...this.scene.notes, ...this.notes];
    const images = [...this.pictures.values()].filter((picture) => picture.what === "image");
    const levels = [...new Set(images.map((picture) => picture.level))].sort();
    if (images.length) lines.push(`level ${levels.join(", ")}; wheel: zoom, shift + wheel: next slice, drag: move`);
    this.status.textContent = lines.join("\n");
  }

  draw() {
    this.sliders.forEach(({ slider, text }, i) => {
      const voxel = Math.round((this.at[i] - this.scene.origin[i]) / this.scene.voxel[i]);
      slider.value = voxel;
      text.textContent = String(Math.max(0, Math.min(this.scene.shape[i] - 1, voxel)));
    });
    for (const panel of this.visible()) this.paint(panel);
  }

  paint({ canvas, row, plane }) {
    const ratio = window.devicePixelRatio || 1;
    const [height, width] = [canvas.clientHeight * ratio, canvas.clientWidth * ratio].map(Math.round);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d");
    const axes = PLANES[plane];
    const pixel = this.pixel / ratio;
    const place = (nm, i) => (i ? width : height) / 2 + (nm - this.at[axes[i]]) / pixel;
    context.fillStyle = "#222";
    context.fillRect(0, 0, width, height);
    for (const what of ["image", "labels"]) {
      const picture = this.pictures.get(`${row} ${plane} ${what}`);
      if (!picture) continue;
      const [top, left] = picture.low.map(place);
      const [bottom, right] = picture.high.map(place);
      context.globalAlpha = what === "labels" ? this.opacity : 1;
      context.imageSmoothingEnabled = false;
      context.drawImage(picture.bitmap, left, top, right - left, bottom - top);
    }
    context.globalAlpha = 1;
    this.bar(context, height, pixel);
  }

  // A length of 1, 2 or 5 times a power of ten, about a fifth of the panel.
  bar(context, height, pixel) {
    const most = (context.canvas.width / 5) * pixel;
    const power = 10 ** Math.floor(Math.log10(most));
    const length = [5, 2, 1].map((n) => n * power).find((n) => n <= most);
    const text = length >= 1e6 ? `${length / 1e6} mm` : length >= 1e3 ? `${length / 1e3} µm` : `${length} nm`;
    context.fillStyle = "white";
    context.strokeStyle = "black";
    context.font = "12px sans-serif";
    context.fillRect(8, height - 12, length / pixel, 4);
    context.strokeText(text, 8, height - 16);
    context.fillText(text, 8, height - 16);
  }
}

export default {
  render({ model, el }) {
    const planes = new Planes(model, el);
    return () => planes.close();
  },
};
