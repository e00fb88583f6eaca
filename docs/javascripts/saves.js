// docs/saves.md: the planner's formulas with what the reader types. bench/saves.py writes the constants into the page.
(() => {
  const place = document.getElementById("saves");
  if (!place) return;
  const {rates, reload, pause, change} = JSON.parse(place.dataset.inputs);
  const fields = {params: ["parameters, billions", 7], density: ["changed, %", 0.6], link: ["link, Mbit/s", 1000],
                  threads: ["threads that code", 16], ranks: ["processes of the engine", 8]};
  const bits = ([positions, rest, , , share], density) => {  // planner.bits; null: no bound
    const entropy = -[density, 1 - density].reduce((sum, p) => sum + (p ? p * Math.log2(p) : 0), 0);
    return Math.min(share * entropy, positions === null ? Infinity : positions * density) + rest * density;
  };
  const calculate = ({params, density, link, threads, ranks}) => {
    const full = 2 * params, sent = 8 * full / link, reloading = reload * full / ranks;
    const writing = pause + change * density * params / ranks;
    const patch = name => {
      const [, , fixed, perDensity] = rates[name];
      const nbytes = Math.round(params * bits(rates[name], density) / 8);
      return {nbytes, seconds: 8 * nbytes / link + full * (fixed + perDensity * density) / threads + writing, pause: writing};
    };
    const gap = patch("gap"), context = patch("context");
    return {"full reload": {nbytes: full, seconds: sent + reloading, pause: reloading},
            "NCCL broadcast": {nbytes: full, seconds: sent, pause: sent},
            "the paper's codec": gap, "ours": gap.seconds < context.seconds ? gap : context};
  };
  const text = (value, units) => {
    const [unit, size] = units.findLast(([, size]) => value >= size) ?? units[0];
    return `${Number((value / size).toPrecision(3)).toLocaleString("en")} ${unit}`;
  };
  const time = value => text(value, [["ms", 1e-3], ["s", 1]]);
  const bytes = value => text(value, [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12]]);
  place.innerHTML = Object.entries(fields).map(([name, [label, value]]) => `<label>${label} <input type="number"
    min="0" step="any" name="${name}" value="${value}"></label>`).join(" ") + `<table><thead><tr><th></th><th>bytes</th>
    <th>publish to serving</th><th>pause</th><th></th></tr></thead><tbody></tbody></table>`;
  const update = () => {
    const typed = Object.fromEntries([...place.querySelectorAll("input")].map(one => [one.name, Number(one.value)]));
    const valid = Object.values(typed).every(one => one > 0) && typed.density <= 100;
    const body = place.querySelector("tbody");
    if (!valid) { body.innerHTML = "<tr><td colspan=5>expected numbers above 0, and at most 100 %</td></tr>"; return; }
    const found = calculate({...typed, params: typed.params * 1e9, density: typed.density / 100, link: typed.link * 1e6});
    const most = Math.max(...Object.values(found).map(one => one.seconds));
    const bar = value => 100 * Math.max(0.01, 1 + Math.log10(value / most) / 6);  // six decades
    body.innerHTML = Object.entries(found).map(([name, one]) => `<tr><td>${name}</td><td>${bytes(one.nbytes)}</td>
      <td>${time(one.seconds)}</td><td>${time(one.pause)}</td><td><svg width="160" height="12" role="img"
      aria-label="logarithmic"><rect width="${bar(one.seconds)}%" height="12" fill="currentColor" opacity=".55"/></svg></td></tr>`).join("");
  };
  place.addEventListener("input", update);
  place.calculate = calculate;  // for tests
  update();
})();
