// Draws the plots of a page; of a live one also what its server sends.
const {live, config, specs} = JSON.parse(document.getElementById("plots").textContent);
const main = document.querySelector("main");
const options = {mode: "vega-lite", renderer: "svg", actions: false, config, tooltip: {disableDefaultStyle: true}};

// Draw a plot. Where one with the same look is there, only its data change.
function draw(place, {data, ...rest}) {
  const look = JSON.stringify(rest);
  place.drawn = (place.drawn ?? Promise.resolve()).then(async () => {
    if (place.look === look) return place.view.data("rows", data.values).runAsync();
    place.view?.finalize();
    place.look = look;
    place.view = (await vegaEmbed(place, {data, ...rest}, options)).view;
  });
}

const wide = new ResizeObserver(entries => entries.forEach(entry => mark(entry.target)));  // also when it is unfolded
function mark(inner) {
  inner.parentElement.classList.toggle("more", inner.scrollLeft + inner.clientWidth + 1 < inner.scrollWidth);
}
function markTables() {
  for (const inner of main.querySelectorAll(".scroll")) { wide.observe(inner); mark(inner); }
}
main.addEventListener("scroll", ({target}) => target.matches(".scroll") && mark(target), {capture: true, passive: true});

// Make an element like a fresh one, so that what the reader has opened, scrolled to or focused stays.
function become(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) { if (old.data !== fresh.data) old.data = fresh.data; return; }
  if (old.matches(".plot")) return;
  for (const {name, value} of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const [had, has] = [[...old.childNodes], [...fresh.childNodes]];
  has.forEach((child, at) => at < had.length ? become(had[at], child) : old.append(child));
  had.slice(has.length).forEach(child => child.remove());
}

// blocks: place, HTML and plot of those that changed; count: of all.
function update({count, blocks}) {
  for (const [at, html, spec] of blocks) {
    const holder = document.createElement("template");
    holder.innerHTML = html;
    if (at < main.children.length) become(main.children[at], holder.content.firstElementChild);
    else main.append(holder.content.firstElementChild);
    if (spec) draw(main.children[at].querySelector(".plot"), spec);
  }
  while (main.children.length > count) main.lastElementChild.remove();
  markTables();
}

function follow() {
  const [button, state] = [document.getElementById("hold"), document.getElementById("state")];
  let source = null;
  const toggle = () => {
    if (source) { source.close(); source = null; }
    else {
      source = new EventSource("events" + location.search);
      source.onopen = () => { state.textContent = "live"; };
      source.onerror = () => { state.textContent = "not reached, trying again"; };
      source.onmessage = ({data}) => update(JSON.parse(data));
    }
    button.textContent = source ? "Pause" : "Go on";
    if (!source) state.textContent = "paused";
  };
  button.addEventListener("click", toggle);
  toggle();
}

main.querySelectorAll(".plot").forEach((place, at) => draw(place, specs[at]));
markTables();
if (live) follow();
