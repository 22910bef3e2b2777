"""The head and the style sheet of the page about runs."""

# Light and dark, phones, print. Texts and lines have a contrast of at least 4.5:1.
SHEET = """\
:root{color-scheme:light dark;--bg:#ffffff;--fg:#1b1f24;--muted:#57606a;--grid:#d8dee4;
--c0:#0b5cad;--c1:#b3400e;--c2:#1a7536;--c3:#7b3fc4;--c4:#a3195b;--c5:#0f6e7a;--c6:#7a5a00;--c7:#4b5563}
@media screen and (prefers-color-scheme:dark){:root{--bg:#14171c;--fg:#e6e9ee;--muted:#a3acb8;
--grid:#333a44;
--c0:#6cb4ff;--c1:#ff9e64;--c2:#6fd08c;--c3:#c9a0ff;--c4:#ff8fb8;--c5:#5fd3e0;--c6:#e0c95a;--c7:#b8bcc4}}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}
.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:1360px;background:var(--bg);color:var(--fg);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.4rem;margin:0}h2{font-size:1.15rem;margin:24px 0 6px}h3{font-size:1rem;
margin:16px 0 4px}h1,h2,li{overflow-wrap:anywhere}
.note{color:var(--muted);margin:4px 0;font-size:.93em}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:16px}
figure{margin:0;break-inside:avoid}figcaption{font-weight:600;overflow-wrap:anywhere}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--fg);font:12px system-ui,sans-serif}.end{text-anchor:end}
.middle{text-anchor:middle}
svg path{fill:none;stroke:currentColor;stroke-width:1.6;stroke-linecap:round;stroke-linejoin:round}
svg .grid{stroke:var(--grid);stroke-width:1}svg .axis{stroke:var(--muted);stroke-width:1}
svg .mark{stroke:var(--muted);stroke-width:1;stroke-dasharray:3 3}svg .dot{stroke-width:5}
svg rect{fill:currentColor}svg .pale{opacity:.45}
svg .line.d1{stroke-dasharray:7 4}svg .line.d2{stroke-dasharray:2 4}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;padding:0;margin:0}
.legend li{display:flex;gap:6px;align-items:center}.legend svg{width:28px;flex:none}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.93em}
th,td{text-align:left;vertical-align:top;padding:3px 12px 3px 0;
border-bottom:1px solid var(--grid);white-space:nowrap}
td:last-child{white-space:normal;overflow-wrap:anywhere;min-width:26ch}
@media print{body{max-width:none;padding:0;font-size:10pt}.figures{grid-template-columns:1fr 1fr}
h2,h3{break-after:avoid}td{white-space:normal}}
"""
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>{sheet}</style></head><body><main><h1>{title}</h1>
"""
