"use strict";
const filter = document.getElementById("filter");
const shown = document.getElementById("shown");
const cards = [...document.querySelectorAll("article[data-shape]")];

filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const card of cards) {
    card.hidden = !words.every((word) => card.dataset.shape.includes(word));
    count += card.hidden ? 0 : 1;
  }
  shown.textContent = words.length ? `${count} of ${cards.length}` : "";
});

// A link from a map opens what it leads to, also when the filter has hidden it.
function open() {
  const card = document.getElementById(location.hash.slice(1));
  if (!card || !card.dataset.shape) return;
  card.hidden = false;
  card.querySelector("details").open = true;
  card.scrollIntoView({ block: "start" });
}
addEventListener("hashchange", open);
open();
