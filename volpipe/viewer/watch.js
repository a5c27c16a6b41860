// Fits the volume into its panels, moves the greys of images that are alike together, shows how far the run is, and draws
// again what changed.
(async () => {
  const script = document.getElementById("volpipe-watch");
  const look = JSON.parse(script.dataset.look);
  const pause = (seconds) => new Promise((resume) => setTimeout(resume, 1000 * seconds));
  const shader = (name) => viewer.layerManager.getLayerByName(name)?.layer?.shaderControlState;

  // A page that was left at another place, and is loaded again, stays as it is.
  const fit = async () => {
    if (sessionStorage.getItem(location.pathname)) return;
    sessionStorage.setItem(location.pathname, "fitted");
    const scale = viewer.state.toJSON().crossSectionScale;
    let edges, before;
    do {
      before = edges;
      await pause(0.2); // the bar of controls takes its room later than the panels
      const panels = [...document.querySelectorAll(".neuroglancer-rendered-data-panel")];
      edges = ["clientHeight", "clientWidth"].map((edge) => Math.min(...panels.map((panel) => panel[edge])));
    } while (String(edges) !== String(before) || !edges.every((edge) => edge > 0 && edge < Infinity));
    const fitting = Math.max(look.edges[0] / edges[0], look.edges[1] / edges[1]) / look.share;
    if (viewer.state.toJSON().crossSectionScale !== scale) return; // moved meanwhile
    viewer.navigationState.zoomFactor.value *= fitting / scale;
  };

  const link = (names) => {
    let isMoved = false;
    for (const name of names)
      shader(name)?.changed.add(() => {
        if (isMoved) return;
        isMoved = true;
        const moved = shader(name)?.toJSON();
        for (const other of names) if (other !== name) moved ? shader(other)?.restoreState(moved) : shader(other)?.reset();
        isMoved = false;
      });
  };

  const bar = document.createElement("div");
  bar.id = "volpipe";
  bar.style.cssText =
    "position:fixed;top:0;left:50%;transform:translateX(-50%);max-width:60%;padding:3px 8px;" +
    "font:13px sans-serif;color:#fff;background:#222;z-index:99;pointer-events:none";
  document.body.append(bar);
  let version = script.dataset.version; // of when the page was sent, before any voxel was
  const coloured = new Set(); // layers that had no voxels when the page began, and whose greys are set since
  while (!window.viewer?.layerManager.managedLayers.length) await pause(0.05);
  look.alike.forEach(link);
  await fit();
  document.body.dataset.fitted = "yes";
  for (;;) {
    try {
      const answer = await (await fetch("../../progress", { cache: "no-store" })).json();
      bar.textContent = answer.sentence;
      bar.hidden = answer.sentence === "";
      for (const [name, controls] of Object.entries(answer.late)) {
        if (!coloured.has(name)) shader(name)?.restoreState(controls);
        coloured.add(name);
      }
      if (answer.version !== version) {
        version = answer.version;
        for (const source of viewer.chunkManager.rpc.objects.values())
          if (JSON.stringify(source.parameters ?? "").includes("/live/")) source.invalidateCache?.();
      }
    } catch {
      bar.textContent = "the server of this page has ended; give the command again";
      bar.hidden = false;
    }
    await pause(script.dataset.seconds);
  }
})();
