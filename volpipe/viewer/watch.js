// Shows how far the run is, and draws again what changed.
(async () => {
  const bar = document.createElement("div");
  bar.id = "volpipe";
  bar.style.cssText =
    "position:fixed;top:0;left:50%;transform:translateX(-50%);max-width:60%;padding:3px 8px;" +
    "font:13px sans-serif;color:#fff;background:#222;z-index:99;pointer-events:none";
  document.body.append(bar);
  const script = document.getElementById("volpipe-watch");
  let version = script.dataset.version; // of when the page was sent, before any voxel was
  for (;;) {
    try {
      const answer = await (await fetch("../../progress", { cache: "no-store" })).json();
      bar.textContent = answer.sentence;
      bar.hidden = answer.sentence === "";
      if (answer.version !== version) {
        version = answer.version;
        for (const source of viewer.chunkManager.rpc.objects.values())
          if (JSON.stringify(source.parameters ?? "").includes("/live/")) source.invalidateCache?.();
      }
    } catch {
      bar.textContent = "the server of this page has ended; give the command again";
      bar.hidden = false;
    }
    await new Promise((resume) => setTimeout(resume, 1000 * script.dataset.seconds));
  }
})();
