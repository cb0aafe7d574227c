"""A flame graph as one self-contained page: zoom by click, search. Asks for nothing."""

from __future__ import annotations

import html
import json

from kvtop.flame.colours import COLOURS, percent
from kvtop.flame.tree import Tree
from kvtop.model.frames import CATEGORIES

_MOST_NODES = 400_000

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>@TITLE@</title>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<style>
body{font:12px monospace;margin:12px;background:#fff;color:#222}
h1{font-size:15px;margin:0 0 4px}p{margin:2px 0}
#graph{position:relative;margin-top:8px}
#graph div{position:absolute;height:16px;overflow:hidden;white-space:nowrap;box-sizing:border-box;
border-right:1px solid #fff;cursor:pointer;padding-left:2px;line-height:15px}
#graph div.hit{outline:2px solid #d000d0;outline-offset:-2px}
.key{display:inline-block;padding:0 6px;margin-right:4px}
input,button{font:12px monospace}
</style></head><body>
<h1>@TITLE@</h1><p>@NOTE@</p><p id="legend">@LEGEND@</p>
<p><input id="search" placeholder="search" size="30"> <button id="out">out</button>
<span id="info">click a frame to zoom</span></p>
<div id="graph"></div>
<script type="application/json" id="data">@DATA@</script>
<script>
"use strict";
const d=JSON.parse(document.getElementById("data").textContent);
const g=document.getElementById("graph"),info=document.getElementById("info");
let zoom=0,wanted="";
function say(n){const t=d.total[n],w=d.total[0]||1;
 return d.labels[d.label[n]]+": "+t+" "+d.unit+", "+(100*t/w).toFixed(2)+" %, self "
 +(100*d.own[n]/w).toFixed(2)+" %, "+d.categories[d.cat[n]];}
function box(n,depth,x,w){const e=document.createElement("div");
 e.style.left=x+"px";e.style.width=Math.max(w,1)+"px";e.style.top=depth*17+"px";
 e.style.background=d.colours[d.cat[n]];
 if(w>20)e.textContent=d.labels[d.label[n]];
 if(wanted&&d.labels[d.label[n]].toLowerCase().includes(wanted))e.className="hit";
 e.title=say(n);e.onclick=()=>{zoom=n;draw();};e.onmouseenter=()=>{info.textContent=e.title;};
 g.appendChild(e);}
function draw(){g.textContent="";const W=g.clientWidth||1200;let depth=0,deep=0;
 const up=[];for(let n=d.parent[zoom];n>=0;n=d.parent[n])up.unshift(n);
 for(const n of up)box(n,depth++,0,W);
 const s=W/(d.total[zoom]||1);const q=[[zoom,depth,0]];
 for(let i=0;i<q.length&&i<20000;i++){const [n,y,x0]=q[i];let x=x0;
  box(n,y,x,d.total[n]*s);deep=Math.max(deep,y);
  for(let c=n+1;c<d.end[n];c=d.end[c]){const w=d.total[c]*s;if(w>=0.5)q.push([c,y+1,x]);x+=w;}}
 g.style.height=(deep+2)*17+"px";}
document.getElementById("out").onclick=()=>{zoom=Math.max(d.parent[zoom],0);draw();};
document.getElementById("search").oninput=e=>{wanted=e.target.value.toLowerCase();
 let t=0;if(wanted){const hit=d.labels.map(l=>l.toLowerCase().includes(wanted));
  for(let n=0;n<d.label.length;){if(hit[d.label[n]]){t+=d.total[n];n=d.end[n];}else n++;}
  info.textContent=(100*t/(d.total[0]||1)).toFixed(1)+" % of all";}draw();};
window.onresize=draw;draw();
</script></body></html>
"""


def write(tree: Tree, title: str, note: str = "") -> str:
    """The page.

    Args:
        tree: The merged stacks. Of a huge tree only nodes that are wide enough to be seen
            are put in.
        title: Heading; may come from outside.
        note: Line below it.
    """
    whole = max(tree.total[0], 1)
    data = _data(tree)
    shares = {} if tree.inverted else tree.split()
    legend = "".join(
        f'<span class="key" style="background:{COLOURS[name]}">{name}'
        f" {html.escape(percent(count, whole))}</span>"
        for name, count in sorted(shares.items(), key=lambda item: -item[1])
    )
    # Inside a script element only `<` could end it or open a comment.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = _PAGE.replace("@TITLE@", html.escape(title)).replace("@NOTE@", html.escape(note))
    return page.replace("@LEGEND@", legend).replace("@DATA@", text)


def _data(tree: Tree) -> dict[str, object]:
    # A node of less than a thirty-thousandth of all is never as wide as a pixel unless zoomed.
    least = tree.total[0] // 30_000 if len(tree) > _MOST_NODES else 0
    kept: list[int] = []
    number: dict[int, int] = {-1: -1}
    node = 0
    while node < len(tree):
        if tree.total[node] < least:
            node = tree.end[node]
            continue
        number[node] = len(kept)
        kept.append(node)
        node += 1
    end = list(range(1, len(kept) + 1))
    for at in range(len(kept) - 1, 0, -1):
        above = number[tree.parent[kept[at]]]
        end[above] = max(end[above], end[at])
    return {
        "labels": tree.labels,
        "label": [tree.label[node] for node in kept],
        "parent": [number[tree.parent[node]] for node in kept],
        "end": end,
        "own": [tree.own[node] for node in kept],
        "total": [tree.total[node] for node in kept],
        "cat": [CATEGORIES.index(tree.category(node)) for node in kept],
        "categories": list(CATEGORIES),
        "colours": [COLOURS[name] for name in CATEGORIES],
        "unit": tree.unit,
    }
