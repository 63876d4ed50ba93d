"""The words that synthetic text is made of: 1,024 short, common English words.

Each of them, written with one space before it, is a single token of the needle model's tokenizer, so that a text
of n words costs n tokens. The order is part of the data: a word's number names it wherever text is derived from
numbers, and a change here changes every derived text.
"""

from __future__ import annotations

_TEXT = """
the in of and to is be for on that you as with an or it are he we by can at from was not this have us your
their lion they all will which do more me other has man about but per out one if so were also part them up who
into these its some how when his our may time under there than go over know people like act year such been use
help new what would need am work any import had off most no many add used only first child system get two
learn where farmer could health should her well every high world even form water sign just make years set data
call my see then result those way each effect while during found count long after read using lead fact test
life very being fun own she find right person back both follow does grow much main before level great end food
start good might within class often around made said show rabbit same too power design again small allow care
less down take day human treat now state called point number build play though body did must plan common want
met three cell pass let social method known real public still change better hand report place sit list feel
light become energy open mean few keep others best direct name create top home stand move among mark look
things type large think law group means rest here based area family due object old try early focus access last
non turn risk making print basket low say impact key period run land case since local head post along value
order occur come text across why cost times areas cause able toward view major course model else press hard
line tool future role until second young works always exist levels put step today given strong little range
age ways book next far flow four short past space amount free later author says needs words net give paper
kind mind having skills field begin parent expect cells appear issues upon log types ask enough likely record
days makes away sum ever going left path higher growth big full super sure never side term unique ground
groups above event least sound near modern affect really rather became reason nature loss cases detail size
hold lower comes meet global word simple regard living single wind source either once seen deep job pay done
team file cut helps fail aspect engine online live fall lot needed action pie idea sent quick reduce target
break soft color ensure red rights parts seem values lives port yet entire share rate came clear below image
whole events taken music avoid states taking tell micro allows review cannot site five white check tools
except doing clean itself began sense react week love remain weight offer true accept matter black draw bring
took cat feed green terms region select months face forms total unit hours almost shows half aim bar recent
claim thing simply commit link close sleep easy extra ideas spread built aware led issue longer stop models
wild lands points slow fire behind media books code ones user uses custom adapt takes safety stay caused
normal daily write inside six causes policy basic answer safe input late page talk exact shape visit cross
shown beyond force poll series warm lack quite theory cover pack output inform eat visual forest easily ago
base host search poor gain tree lines active larger fit added bit table images prior speak hands friend steps
bad thus soon spirit video offers got named waste rules places hot refer agree trying rates final held mix
asked trees seems card legal sea rich front whose highly favor sold third useful raise reach device obtain
goal dry costs memory fair load went demand length choose month fast speed status via novel mount symbol
supply room lost wide shared bound block users carry stage trust tests forces news graph limit saw date fields
laws leaves center items teach trade weeks depend root ten apply told copy egg shall deal piece serve assign
degree hope names moment task rare effort expand web sites middle gives save nearly leave goes rule older
guide goals miss fresh scale sugar heard box valid style core cold alone member basis equal worth wrong layer
detect fully email fix note figure math signs watch bodies enter moving map risks giving wanted worked occurs
wrote joint master coming passed factor choice adjust index topic assist weak store refers actual easier
placed deeper former sample happen track anyone excess formed vary showed remove gets topics solid label
random tasks letter board filled ready pen sort pieces blue chance eight pick gave row expert manage error
belong native walk column truth buy helped files onto heavy sounds office height option format prefer turned
notes race colors win party leads vast tour court huge units multi seek cycle minor survey bottom star hear
notice widely grant secret spring wall drive string moved spent gather seven meant signal saying fine volume
adding served arm item title advice cast seed plot papers upper origin smart mere round screen array roll send
looks butter owners aid linked jobs pages radio credit roots roles tail maybe mostly enable sets apart push
square phase eggs secure taught worry looked faster noted whom knew spend hour please charge align ideal tiny
stream truly salt smooth cotton knows yield brief kept layers kinds solve raised firm raw views double flat
closer ship happy edge spaces texts handle thin tips asking mainly hidden begins medium tried forced client
window manner mode yellow pretty era skill decide join match formal drop click extent remark links moral wait
depth serves blog filter listen fill define sides lots chain touch starts claims stages paid lose sell grown
chosen exists band ahead wants trial node latest prompt stem script budget wave catch server adopt couple
relax entry calls acts brand shapes nearby shift wire frame tells inner gained cloud narrow switch noise
seeing floor reader fold stored marked pure tested river stone garden bridge market winter summer silver
copper island valley harbor kitchen candle orange
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
