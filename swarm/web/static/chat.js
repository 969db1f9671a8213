// A small chat with the gateway this page came from. The conversation lives in this page only.
const $ = (id) => document.getElementById(id);
let turns = [];
let stopper = null;

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function show(role, text) {
  const item = $("turns").appendChild(document.createElement("li"));
  item.className = role;
  item.textContent = text;
  item.scrollIntoView({ block: "end" });
  return item;
}

async function told(answer) {
  try { return (await answer.json()).error.message; } catch { return `HTTP ${answer.status}`; }
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the gateway hung up in the middle of the answer");
    held += value;
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const data = held.slice(0, end).replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask(text) {
  const mine = turns; // of this conversation: a new one may have begun before the answer ends
  mine.push({ role: "user", content: text });
  show("user", text);
  const item = show("assistant", "…");
  let answer = "", nTokens = 0;
  const started = performance.now();
  let first = 0;
  stopper = new AbortController();
  $("stop").hidden = false;
  $("send").disabled = true;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), signal: stopper.signal,
      body: JSON.stringify({ messages: mine, stream: true, stream_options: { include_usage: true } }),
    });
    if (!response.ok) throw new Error(await told(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices[0]?.delta?.content ?? "";
      if (piece) { first ||= performance.now(); answer += piece; item.textContent = answer; }
      nTokens = event.usage?.completion_tokens ?? nTokens;
    }
  } catch (error) {
    if (error.name !== "AbortError") show("failed", String(error.message));
  } finally {
    if (answer) mine.push({ role: "assistant", content: answer }); else { item.remove(); mine.pop(); }
    const writing = (performance.now() - first) / 1000;
    $("stats").textContent = nTokens > 1 && first
      ? `${nTokens} tokens, first after ${((first - started) / 1000).toFixed(1)} s, then ${((nTokens - 1) / writing).toFixed(1)} tokens/s` : "";
    stopper = null;
    $("stop").hidden = true;
    $("send").disabled = false;
    $("text").focus();
  }
}

$("form").onsubmit = (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || stopper) return;
  $("text").value = "";
  ask(text);
};
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
};
$("stop").onclick = () => stopper?.abort();
$("new").onclick = () => { stopper?.abort(); turns = []; $("turns").replaceChildren(); $("stats").textContent = ""; };
fetch("/v1/models", { headers: headers() }).then(async (answer) => {
  $("model").textContent = answer.ok ? (await answer.json()).data[0].id : await told(answer);
}).catch(() => { $("model").textContent = "the gateway does not answer"; });
